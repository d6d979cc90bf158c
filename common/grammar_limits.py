"""Limit of work on a grammar that scheduler and workers share: what a trial admits, a worker can begin."""

# Items of the parser that one mask may need. Where a text can be read in several ways, they grow in number with the
# output, and in cost faster: with `e: e e | /[a-z ]/` 10,000 come behind 150 tokens, and a mask takes 25 ms then. JSON
# schemas need some hundred, one of 300 optional properties with free whitespace 8,000.
STEP_MAX_ITEMS = 10_000
