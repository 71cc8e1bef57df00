"""`make demo`: a small real model reads real text through the package's caches, one format after another."""
