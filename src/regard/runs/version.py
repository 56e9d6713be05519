"""The version of Regard, known whether it is installed or not."""

VERSION = "0.1.0"
