"""From many requests to one pass and back."""
