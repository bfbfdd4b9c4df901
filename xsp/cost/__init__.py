"""Operations and memory traffic of an operator, from its name and its inputs."""
