//! Sizes as people write them: `4096`, `256KiB`, `1.5 GiB`.

/// Why a text is not a size that a setting can have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadSize {
    /// It is no number with a unit.
    #[error("{0:?} is not a size, such as 256KiB or 1.5GiB")]
    Unreadable(String),
    /// No count of bytes holds it.
    #[error("{0:?} is too large: a size is less than 16EiB")]
    TooLarge(String),
    /// It is above zero, and no whole byte.
    #[error("{0:?} is less than one byte")]
    BelowOneByte(String),
}

/// Digits of a fraction that count: the further ones are less than a byte of any unit.
const FRACTION_DIGITS: usize = 19;

/// The bytes of a size: a number and a unit, in capitals or not. A number without a unit is bytes.
///
/// # Errors
///
/// [`BadSize`] names the text. No size is rounded to zero, or down to the largest one.
pub fn parse(text: &str) -> Result<u64, BadSize> {
    let unreadable = || BadSize::Unreadable(text.to_owned());
    let too_large = || BadSize::TooLarge(text.to_owned());
    let is_number = |c: char| c.is_ascii_digit() || c == '.';
    let end = text.find(|c: char| !is_number(c)).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
        return Err(unreadable());
    }
    let factor = match unit.trim_start() {
        // A fraction of an unnamed unit is a mistake.
        "" if !number.contains('.') => 1,
        unit => factor(unit).ok_or_else(unreadable)?,
    };
    let factor = u128::from(factor);
    // Only the number of digits can make these fail.
    let whole: u128 = match whole {
        "" => 0,
        whole => whole.parse().map_err(|_| too_large())?,
    };
    let mut part: u128 = 0;
    let mut scale: u128 = 1;
    for digit in fraction.chars().take(FRACTION_DIGITS) {
        part = part * 10 + u128::from(digit.to_digit(10).unwrap_or(0));
        scale *= 10;
    }
    let bytes = whole
        .checked_mul(factor)
        .and_then(|bytes| bytes.checked_add(part * factor / scale))
        .and_then(|bytes| u64::try_from(bytes).ok())
        .ok_or_else(too_large)?;
    if bytes == 0 && number.contains(|c: char| ('1'..='9').contains(&c)) {
        return Err(BadSize::BelowOneByte(text.to_owned()));
    }
    Ok(bytes)
}

/// The bytes of a unit.
fn factor(unit: &str) -> Option<u64> {
    let unit = unit.to_ascii_lowercase();
    if unit == "b" {
        return Some(1);
    }
    Some(match unit.strip_suffix('b').unwrap_or(&unit) {
        "k" => 1_000,
        "m" => 1_000_000,
        "g" => 1_000_000_000,
        "t" => 1_000_000_000_000,
        "p" => 1_000_000_000_000_000,
        "e" => 1_000_000_000_000_000_000,
        "ki" => 1 << 10,
        "mi" => 1 << 20,
        "gi" => 1 << 30,
        "ti" => 1 << 40,
        "pi" => 1 << 50,
        "ei" => 1 << 60,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_every_unit() {
        for (text, bytes) in [
            ("0", 0),
            ("0B", 0),
            ("0.0GiB", 0),
            ("500", 500),
            ("7b", 7),
            ("1K", 1_000),
            ("1ki", 1 << 10),
            ("1.5KiB", 1536),
            ("0.3KiB", 307),
            (".5kb", 500),
            ("3 MB", 3_000_000),
            ("2TiB", 2 << 40),
            ("9007199254740993B", 9_007_199_254_740_993),
            ("15EiB", 15 << 60),
            ("18446744073709551615", u64::MAX),
            ("0.000000000000000001EiB", 1),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn a_size_that_no_count_of_bytes_holds_is_refused_by_name() {
        let named = |text: &str| text.to_owned();
        for text in ["16EiB", "99999EiB", "18446744073709551616", "20.5EB"] {
            assert_eq!(parse(text), Err(BadSize::TooLarge(named(text))));
        }
        let long = "9".repeat(60);
        assert_eq!(parse(&long), Err(BadSize::TooLarge(named(&long))));
        for text in ["0.1B", "0.0001KiB", "0.00000000000000000000001EiB"] {
            assert_eq!(parse(text), Err(BadSize::BelowOneByte(named(text))));
        }
        for text in ["", "B", ".", "1.2.3KiB", "1.5", "-1", "1XiB", "1bb", "much"] {
            assert_eq!(parse(text), Err(BadSize::Unreadable(named(text))));
        }
    }
}
