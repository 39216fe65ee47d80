"""The parts of ``checkpoint``: what its files hold, how they describe it, and how it gets to other ranks.

What is where:

    contents rest codes rows common           what is in the files
    manifest digesting                        what a checkpoint says about itself, and digests of its files
    saving writing staging background removal from every rank's snapshot to a folder, also while training goes on
    surveying sites sending                   which ranks have which files
    loading reshard restoring                 from the pieces of files to those of ranks
    faults                                    what fails on one rank fails on all
    nanochat                                  files of another optimizer
"""
