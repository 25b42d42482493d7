"""The commands of `pairledger`, a module each: HELP (a phrase), ABOUT, EXAMPLE, `arguments`, `run`."""
