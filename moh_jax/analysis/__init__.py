"""What heads do in a trained model."""
