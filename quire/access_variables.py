"""Names of the variables by which every caller knows its key, its certificate and those of servers. Loads nothing."""

API_KEY = "QUIRE_API_KEY"  # of a server: the keys that it accepts, too
TLS_ROOT = "QUIRE_TLS_ROOT"
TLS_SERVER_NAME = "QUIRE_TLS_SERVER_NAME"
TLS_CLIENT_CERT = "QUIRE_TLS_CLIENT_CERT"
TLS_CLIENT_KEY = "QUIRE_TLS_CLIENT_KEY"
