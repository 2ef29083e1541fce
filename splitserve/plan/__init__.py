"""How large a cluster for a model has to be: arithmetic over its config and a GPU's data sheet."""
