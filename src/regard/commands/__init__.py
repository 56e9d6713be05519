"""The five verbs, one package each: config, run, result, page, command line."""
