//! Errors as people read them.

use std::error::Error;
use std::fmt;

/// An error and its causes in one line. A cause is left out if an earlier message already contains its text.
#[derive(Debug)]
pub struct Causes<'e>(pub &'e (dyn Error + 'static));

impl fmt::Display for Causes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut said = self.0.to_string();
        f.write_str(&said)?;
        let mut next = self.0.source();
        while let Some(cause) = next {
            let text = cause.to_string();
            if !said.contains(&text) {
                write!(f, ": {text}")?;
                said = text;
            }
            next = cause.source();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    enum Step {
        #[error("cannot open: {0}")]
        Named(#[source] std::io::Error),
        #[error("cannot start")]
        Silent(#[source] Box<Step>),
    }

    #[test]
    fn each_cause_is_said_once() {
        let missing = || std::io::Error::from(std::io::ErrorKind::NotFound);
        let named = Step::Named(missing());
        let expected = format!("cannot open: {}", missing());
        assert_eq!(Causes(&named).to_string(), expected);
        let silent = Step::Silent(Box::new(named));
        let expected = format!("cannot start: {expected}");
        assert_eq!(Causes(&silent).to_string(), expected);
    }
}
