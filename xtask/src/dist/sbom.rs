//! The software bill of materials: CycloneDX 1.5 in JSON.
//!
//! It has no serial number, and its only time is the commit's. So the same source gives the same bytes.

use super::crates::Crate;
use super::release::Stamp;
use anyhow::Result;
use serde_json::{Value, json};

/// The bill of all `crates`.
pub(super) fn text(crates: &[Crate], stamp: &Stamp) -> Result<String> {
    Ok(serde_json::to_string_pretty(&bill(crates, stamp))? + "\n")
}

fn bill(crates: &[Crate], stamp: &Stamp) -> Value {
    let seconds = stamp.seconds.parse().unwrap_or(0);
    let product = "pkg:generic/kvpool";
    let version = crates
        .iter()
        .find(|one| one.is_ours())
        .map_or("", |one| &one.version);
    let ours: Vec<_> = crates.iter().filter(|one| one.is_ours()).map(url).collect();
    let mut dependencies = vec![json!({"ref": product, "dependsOn": ours})];
    dependencies.extend(crates.iter().map(|one| {
        let uses: Vec<_> = one.uses.iter().map(|used| url(&crates[*used])).collect();
        json!({"ref": url(one), "dependsOn": uses})
    }));
    json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "timestamp": utc(seconds),
            "component": {
                "type": "application",
                "bom-ref": product,
                "name": "kvpool",
                "version": version,
                "licenses": [{"expression": "Apache-2.0"}],
                "properties": [{"name": "kvpool:commit", "value": stamp.commit}],
            },
        },
        "components": crates.iter().map(component).collect::<Vec<_>>(),
        "dependencies": dependencies,
    })
}

fn component(one: &Crate) -> Value {
    let mut component = json!({
        "type": "library",
        "bom-ref": url(one),
        "purl": url(one),
        "name": one.name,
        "version": one.version,
        "scope": "required",
    });
    if !one.description.is_empty() {
        component["description"] = json!(one.description);
    }
    if !one.licence.is_empty() {
        component["licenses"] = json!([{"expression": one.licence}]);
    }
    if !one.authors.is_empty() {
        component["author"] = json!(one.authors.join(", "));
    }
    if let Some(sum) = &one.checksum {
        component["hashes"] = json!([{"alg": "SHA-256", "content": sum}]);
    }
    if !one.repository.is_empty() {
        component["externalReferences"] = json!([{"type": "vcs", "url": one.repository}]);
    }
    component
}

/// The package URL. A `+` in a version would be a space.
fn url(one: &Crate) -> String {
    format!("pkg:cargo/{}@{}", one.name, one.version.replace('+', "%2B"))
}

/// Seconds since 1970 as RFC 3339.
fn utc(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (mut year, mut day) = (1970, days);
    let is_leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    while day >= 365 + u64::from(is_leap(year)) {
        day -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let mut month = 1;
    for length in [
        31,
        28 + u64::from(is_leap(year)),
        31,
        30,
        31,
        30,
        31,
        31,
        30,
        31,
        30,
        31,
    ] {
        if day < length {
            break;
        }
        day -= length;
        month += 1;
    }
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!(
        "{year:04}-{month:02}-{:02}T{hour:02}:{minute:02}:{second:02}Z",
        day + 1
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dist::crates::{PROGRAMS, compiled_into};
    use std::collections::BTreeSet;

    #[test]
    fn a_time_is_a_date_of_the_calendar() {
        assert_eq!(utc(0), "1970-01-01T00:00:00Z");
        assert_eq!(utc(951_827_696), "2000-02-29T12:34:56Z");
        assert_eq!(utc(1_735_689_599), "2024-12-31T23:59:59Z");
    }

    #[test]
    fn each_reference_names_a_component_and_no_two_are_equal() {
        let crates = compiled_into(&PROGRAMS, "x86_64-unknown-linux-gnu").unwrap();
        let stamp = Stamp {
            seconds: "86400".into(),
            commit: "c0ffee".into(),
        };
        let bill = bill(&crates, &stamp);
        let components = bill["components"].as_array().unwrap();
        let known: BTreeSet<_> = components
            .iter()
            .map(|one| one["bom-ref"].as_str().unwrap())
            .collect();
        assert_eq!(known.len(), crates.len(), "two components have one name");
        for dependency in bill["dependencies"].as_array().unwrap() {
            for used in dependency["dependsOn"].as_array().unwrap() {
                assert!(known.contains(used.as_str().unwrap()), "{used}");
            }
        }
        for one in components {
            assert!(
                one["licenses"][0]["expression"].is_string(),
                "{} has no licence",
                one["name"]
            );
        }
        assert_eq!(bill["metadata"]["timestamp"], "1970-01-02T00:00:00Z");
    }
}
