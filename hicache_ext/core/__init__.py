"""Engine-independent heart of the cache: tree, tickets, tick. Imports neither SGLang nor torch."""
