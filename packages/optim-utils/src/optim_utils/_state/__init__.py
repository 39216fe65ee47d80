"""Behind ``optimizer_modules`` and ``shampoo_checkpoint_utils``: what is state, how it is named, how it is loaded."""
