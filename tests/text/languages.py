"""Real text in many languages, composed from the locale data of babel."""

from datetime import date
from functools import cache

from babel import Locale
from babel.dates import format_date
from babel.localedata import locale_identifiers


@cache
def texts_by_language() -> dict[str, str]:
    """One text per language that names itself and its months in its own words."""
    texts: dict[str, str] = {}
    english = list(Locale("en").months["format"]["wide"].values())
    for identifier in sorted(locale_identifiers()):
        locale = Locale.parse(identifier)
        months = list(locale.months["format"]["wide"].values())
        is_own = locale.language in locale.languages and months[0] != "M01"
        if (
            locale.language not in texts
            and is_own
            and (months != english or locale.language == "en")
        ):
            texts[locale.language] = compose(locale)
    return texts


def compose(locale: Locale) -> str:
    territories = [name for _, name in sorted(locale.territories.items())][:12]
    lines = [
        locale.languages[locale.language],
        ", ".join(territories),
        " ".join(locale.months["format"]["wide"].values()),
        " ".join(locale.days["format"]["wide"].values()),
        format_date(date(2026, 7, 9), format="full", locale=locale),
    ]
    return "\n".join(lines)
