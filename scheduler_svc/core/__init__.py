"""Pure core: sequences, blocks, the choice of what each worker computes next. Imports the standard library only."""
