"""The command that installs missing extras, from a clone: `quire` on PyPI is another project."""


def install_hint(*extras: str) -> str:
    """The command that adds these extras of the distribution `quire-llm`."""
    return f"pip install '.[{','.join(extras)}]' in a clone of Quire"
