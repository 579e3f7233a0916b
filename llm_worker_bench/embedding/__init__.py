"""Benchmarks of embedding models: speed against peers, cosine to float32, retrieval on a labelled set."""
