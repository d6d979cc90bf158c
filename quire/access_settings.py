"""Settings of the servers that clients reach: which API keys they accept, and the certificate that they show."""

from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from quire.api_keys import read_api_keys
from quire.certificates import check_pair
from quire.settings import Settings


class AccessSettings(Settings):
    """Without keys every caller is served; without a certificate nothing is encrypted."""

    api_key_file: Path | None = Field(
        None,
        description="file of API keys, one a line, of which callers must send one, read again once it has changed; "
        "QUIRE_API_KEY has one, or several with commas between, that are accepted too; neither: every caller is served",
    )
    tls_cert: Path | None = Field(
        None,
        description="PEM file of the certificate that is shown, with its chain, read again once it is renewed; absent: "
        "no encryption",
    )
    tls_key: Path | None = Field(None, description="PEM file of the certificate's private key, without a password")

    @field_validator("api_key_file")
    @classmethod
    def _readable_keys(cls, value: Path | None) -> Path | None:
        if value is not None:
            read_api_keys(value)
        return value

    @model_validator(mode="after")
    def _certificate_with_its_key(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key belong together: give both, or neither")
        if self.tls_cert is not None and self.tls_key is not None:
            check_pair(self.tls_cert, self.tls_key)
        return self
