"""How to install what a command lacks, in words that work from a clone: `quire` on PyPI is another project."""


def install_hint(*extras: str) -> str:
    """The command that adds these extras of the distribution `quire-llm`."""
    return f"pip install '.[{','.join(extras)}]' in a clone of Quire"
