"""The proof on a GPU: ``python -m benchmarks.gpu``, which ``make gpu`` runs."""
