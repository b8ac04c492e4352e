"""Which config to run, from which evidence; problems that were asked for and not tuned."""
