"""How warps get their work: splits of a sequence's pages, or an even share of all pages (Stream-K)."""
