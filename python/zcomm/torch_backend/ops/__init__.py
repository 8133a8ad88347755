"""Operations of a process group under the names by which torch calls them."""
