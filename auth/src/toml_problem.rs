//! What is wrong with a TOML file that may hold a secret.

/// Where in `text` the error is, and why. The error's own text has the whole line: where a file was named by
/// mistake, that line can be a token or a key.
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

/// `invalid type: string "VALUE", expected …` without the value.
fn without_value(message: &str) -> String {
    let found = message.split_once(": string \"");
    let expected = found.and_then(|(problem, rest)| Some((problem, rest.rsplit_once("\", ")?.1)));
    match expected {
        Some((problem, expected)) => format!("{problem}: a string, {expected}"),
        None => message.to_owned(),
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
            "line 2, column 11: invalid type: a string, expected u32"
        );
        let unknown = problem("thread = 3\n");
        assert!(unknown.contains("unknown field `thread`"), "{unknown}");
    }
}
