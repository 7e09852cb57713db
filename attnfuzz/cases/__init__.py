"""What is known of the fields of a case: how each is made simpler, told and compared. Torch-free."""
