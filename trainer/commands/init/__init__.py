"""`trainer init`: makes a project to start from: a model and its data, an experiment, a test and a README."""
