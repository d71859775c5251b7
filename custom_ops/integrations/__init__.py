"""Other libraries' models on our ops; each module needs the library it is named after."""
