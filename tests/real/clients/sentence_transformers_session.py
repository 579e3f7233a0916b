"""Embeddings by `sentence-transformers`, in an environment of its own: prints a list of rows for a list of texts."""

import json
import sys

from sentence_transformers import SentenceTransformer

model = SentenceTransformer(sys.argv[1], device="cpu")
print(json.dumps(model.encode(json.load(sys.stdin), normalize_embeddings=True).tolist()))
