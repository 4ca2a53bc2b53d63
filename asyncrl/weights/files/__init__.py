"""The weight store `files`: versions in a folder that learner and engines share."""
