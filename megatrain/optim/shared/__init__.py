"""Updates of a store that several ranks of one host share: which rank updates which parameters, and when all are."""
