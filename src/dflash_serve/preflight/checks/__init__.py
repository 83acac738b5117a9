"""One module a check: `IDS`, the findings it can make, and `check(context)`. Dropping a module in is registering it."""
