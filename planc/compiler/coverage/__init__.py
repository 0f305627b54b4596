"""What planc compiles of what transformers knows: small models of every causal-LM type, built, run and compared."""
