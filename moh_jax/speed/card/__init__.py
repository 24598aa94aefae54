"""`bench card`: everything that is worth measuring on one GPU or TPU."""
