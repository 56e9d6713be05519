"""The commands, one package each: config, run, result, page, command line."""
