"""Native bodies for CPUs: C++ sources, their compilation and the calls into them. Imports nothing here."""
