"""Parts of the tiny pair's trainer: corpus, tokenizer, models, training, checkpoints."""
