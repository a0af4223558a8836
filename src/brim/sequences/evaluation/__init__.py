"""What a trained network is worth: scores, embeddings, requests."""
