"""What every section of a run's configuration is made of."""

from pydantic import BaseModel, ConfigDict, model_validator

from slipstream.config_rules import Impossible

# A section renders as a form in the Prefect UI: every field has a title and a description with its unit.
FORBID = ConfigDict(extra="forbid", validate_assignment=True, protected_namespaces=(), allow_inf_nan=False)


# Numbers end up in 32-bit fields of libraries, and seconds in their 32-bit milliseconds.
LARGEST = 2**31 - 1
MOST_SECONDS = 2_000_000.0
# the libraries' own time-outs come later than the run's deadlines: those name the phase, and end all ranks together
LIBRARY_MARGIN_S = 600.0
MOST_DEADLINE = MOST_SECONDS - LIBRARY_MARGIN_S


class Section(BaseModel):
    model_config = FORBID

    @model_validator(mode="after")
    def _bounded(self) -> "Section":
        given = [(name, getattr(self, name)) for name in type(self).model_fields]
        large = [(name, value) for name, value in given if isinstance(value, int | float) and value > LARGEST]
        if large:
            raise Impossible([(name, value, f"is too large: at most {LARGEST}") for name, value in large])
        return self
