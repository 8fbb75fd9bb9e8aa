//! When a token begins and ends, and when operators are warned of its end.

use crate::claims::peek;

/// Operators are warned of an end within this many seconds.
const NEAR_S: u64 = 86_400;
/// The warning comes only in the last tenth of a token's life. A token that is renewed on time does
/// not reach it.
const LAST_PART: u64 = 10;
/// The time before the end at which the warning begins, for a token that does not say when it begins. The length of
/// its life is unknown, and Kubernetes renews a token of an hour 720 s before its end.
const LAST_S: u64 = 600;

/// The times of a token, in seconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenLife {
    /// When it was issued, or is valid from; 0 when it does not say.
    pub begins: u64,
    /// When it expires.
    pub expires: u64,
}

impl TokenLife {
    /// The times that a token names, without any check. `None` when it names no end.
    pub(crate) fn of(token: &str) -> Option<Self> {
        let claims = peek(token)?;
        let seconds = |name: &str| claims.get(name).and_then(serde_json::Value::as_u64);
        Some(Self {
            begins: seconds("iat").or_else(|| seconds("nbf")).unwrap_or(0),
            expires: seconds("exp")?,
        })
    }

    /// The warning about the token at a time; `None` while its end is far.
    pub(crate) fn problem(self, now: u64) -> Option<String> {
        let Some(left) = self.expires.checked_sub(now).filter(|left| *left > 0) else {
            return Some(format!("has expired {} ago", span(now - self.expires)));
        };
        let last = match self.begins {
            0 => LAST_S,
            begins => self.expires.saturating_sub(begins) / LAST_PART,
        };
        let is_near = left < NEAR_S && left < last;
        is_near.then(|| format!("expires in {}", span(left)))
    }
}

/// A time in one unit, rounded down.
fn span(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7_200 => format!("{} min", seconds / 60),
        7_200..172_800 => format!("{} h", seconds / 3_600),
        _ => format!("{} days", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_told_in_the_last_tenth_of_a_life_and_in_its_last_day() {
        let life = |begins, expires| TokenLife { begins, expires };
        let day = 86_400;
        let month = life(1_000, 1_000 + 30 * day);
        assert_eq!(month.problem(1_000 + 28 * day), None);
        let last = month.problem(1_000 + 29 * day + 1);
        assert_eq!(last.as_deref(), Some("expires in 23 h"));
        // Kubernetes renews a token of an hour when a fifth of it is left.
        let hour = life(1_000, 4_600);
        assert_eq!(hour.problem(4_600 - 720), None);
        assert_eq!(
            hour.problem(4_600 - 300).as_deref(),
            Some("expires in 5 min")
        );
        assert_eq!(hour.problem(4_600).as_deref(), Some("has expired 0 s ago"));
    }

    #[test]
    fn an_end_is_told_ten_minutes_before_where_the_begin_is_unknown() {
        let now = 1_800_000_000;
        let silent = TokenLife {
            begins: 0,
            expires: now,
        };
        // Renewed with a fifth of an hour left, it never comes to its last ten minutes.
        assert_eq!(silent.problem(now - 720), None);
        assert_eq!(silent.problem(now - 600), None);
        let last = silent.problem(now - 599);
        assert_eq!(last.as_deref(), Some("expires in 9 min"));
        assert_eq!(silent.problem(now).as_deref(), Some("has expired 0 s ago"));
    }
}
