"""What all of hfnn stands on: the choice of a kernel, autograd functions and nodes, recipes, packed bits."""
