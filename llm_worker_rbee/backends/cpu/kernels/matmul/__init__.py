"""Products of packed weights with activations: from packed codes for few tokens, from unpacked bytes for many."""
