"""The verbs of `adaptiveload`, one module each. Tables or JSON on stdout, words on stderr."""
