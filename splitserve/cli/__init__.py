"""The `splitserve` command. `main` is its entry point; each command is a module of its own, loaded when it is used."""
