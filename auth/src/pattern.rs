//! Patterns of names: `*` stands for any text, also none.

use serde::{Deserialize, Deserializer, de};

/// The most stars in one pattern. It bounds the work of a match.
const MOST_STARS: usize = 8;

/// A pattern of names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pattern(String);

impl Pattern {
    pub(crate) fn new(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Err("an empty pattern matches nothing: write * for every name".to_owned());
        }
        if text.matches('*').count() > MOST_STARS {
            return Err(format!("pattern {text:?} has more than {MOST_STARS} stars"));
        }
        Ok(Self(text.to_owned()))
    }

    /// The pattern as it was written.
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether the pattern matches every name.
    pub(crate) fn is_every(&self) -> bool {
        self.0 == "*"
    }

    /// Whether the pattern matches the whole of `name`.
    pub(crate) fn matches(&self, name: &str) -> bool {
        let mut parts = self.0.split('*');
        let Some(rest) = parts.next().and_then(|head| name.strip_prefix(head)) else {
            return false;
        };
        let Some(tail) = parts.next_back() else {
            // There is no star.
            return rest.is_empty();
        };
        // Each part in between takes its first place: that leaves the most for the parts behind.
        let rest = parts.try_fold(rest, |rest, part| {
            rest.find(part).map(|at| &rest[at + part.len()..])
        });
        rest.is_some_and(|rest| rest.ends_with(tail))
    }
}

impl<'de> Deserialize<'de> for Pattern {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        Self::new(&String::deserialize(from)?).map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_is_any_text_and_the_rest_is_itself() {
        for (pattern, name, matches) in [
            ("a", "a", true),
            ("a", "ab", false),
            ("a", "", false),
            ("*", "", true),
            ("*", "x", true),
            ("a*", "a", true),
            ("a*", "ba", false),
            ("*a", "ba", true),
            ("*a", "ab", false),
            ("a*b", "ab", true),
            ("a*b", "a", false),
            ("aba*aba", "aba", false),
            ("a*b*c", "axbyc", true),
            ("a*b*c", "acb", false),
            ("team-*", "team-a", true),
            ("team-*", "tea", false),
            (
                "system:serviceaccount:a:*",
                "system:serviceaccount:a:x",
                true,
            ),
            (
                "system:serviceaccount:a:*",
                "system:serviceaccount:ab:x",
                false,
            ),
        ] {
            let found = Pattern::new(pattern).unwrap().matches(name);
            assert_eq!(found, matches, "{pattern} {name}");
        }
        assert!(Pattern::new("").is_err());
        assert!(Pattern::new("*********").is_err());
    }
}
