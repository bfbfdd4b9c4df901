"""Operations and bytes of an operator, from its name and its inputs."""
