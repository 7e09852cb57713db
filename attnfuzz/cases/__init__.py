"""Fields of a case: how each is made simpler, told and compared. Torch-free."""
