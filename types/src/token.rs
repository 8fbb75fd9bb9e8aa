//! A client's credential.

use std::fmt;

/// Proves to a node that a client may connect; empty while authentication is off. `Debug` prints
/// only whether the token is set, so logs of options and hellos reveal nothing.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// The token's text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<String> for Token {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() {
            "Token(none)"
        } else {
            "Token(..)"
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_logged_token_shows_only_whether_it_is_set() {
        let token = Token::from("open sesame".to_owned());
        assert_eq!(token.as_str(), "open sesame");
        assert_eq!(format!("{token:?}"), "Token(..)");
        assert_eq!(format!("{:?}", Token::default()), "Token(none)");
    }
}
