//! What a client proves itself with.

use std::fmt;

/// What proves to a node that a client may connect; empty while authentication is off. `Debug` says no
/// more than whether there is one: what is logged of options and greetings gives nothing away.
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
    fn what_is_logged_of_a_token_is_whether_there_is_one() {
        let token = Token::from("open sesame".to_owned());
        assert_eq!(token.as_str(), "open sesame");
        assert_eq!(format!("{token:?}"), "Token(..)");
        assert_eq!(format!("{:?}", Token::default()), "Token(none)");
    }
}
