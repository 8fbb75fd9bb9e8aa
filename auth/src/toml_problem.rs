//! The error of a TOML file that may hold a secret.

/// The position of the error in `text`, and its reason. The error's own message quotes the whole line. If the wrong
/// file was named, that line can be a token or a key.
pub fn toml_problem(text: &str, error: &toml::de::Error) -> String {
    let before = error.span().and_then(|span| text.get(..span.start));
    let message = without_value(error.message());
    match before {
        None => message,
        Some(before) => {
            let line = before.matches('\n').count() + 1;
            let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
            format!("line {line}, column {column}: {message}")
        }
    }
}

/// `invalid type: string "VALUE", expected …` without the value. Names of fields stay.
fn without_value(message: &str) -> String {
    let quoted = message
        .find(['"', '`'])
        .filter(|_| !message.starts_with("unknown field"));
    let expected = message.rfind(", expected ");
    match quoted.zip(expected) {
        Some((quoted, expected)) if quoted < expected => {
            let (problem, expected) = (message.get(..quoted), message.get(expected..));
            format!(
                "{}{}",
                problem.unwrap_or_default().trim_end(),
                expected.unwrap_or_default()
            )
        }
        _ => message.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(text: &str) -> String {
        #[derive(Debug, serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        struct File {
            #[serde(rename = "threads")]
            _threads: u32,
        }
        toml_problem(text, &toml::from_str::<File>(text).unwrap_err())
    }

    #[test]
    fn a_problem_has_its_place_and_no_value() {
        let token = "eyJhbGciOiJFZERTQSJ9.eyJzdWIiOiJhIn0.SIGNATURE";
        let bare = problem(token);
        assert!(bare.starts_with("line 1, column "), "{bare}");
        assert!(
            !bare.contains("eyJ") && !bare.contains("SIGNATURE"),
            "{bare}"
        );
        let other = problem(&format!("# a comment\nthreads = \"{token}\"\n"));
        assert_eq!(
            other,
            "line 2, column 11: invalid type: string, expected u32"
        );
        let unknown = problem("thread = 3\n");
        assert!(unknown.contains("unknown field `thread`"), "{unknown}");
    }
}
