"""The base of all of hfnn: the choice of a kernel, autograd functions and nodes, recipes, packed bits."""
