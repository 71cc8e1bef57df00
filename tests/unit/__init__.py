"""Tests of what needs no kernel: formats, cache, reference, integrations, command line, docs, scripts of perf/."""
