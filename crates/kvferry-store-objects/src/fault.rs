//! Log texts for errors of an object store.

use kvferry_store::objects::Fault;

/// Characters of a fault at most.
const LEN_MAX: usize = 300;

/// One line, without what servers repeat of a request: an answer to a wrong signature has the session's token.
pub(crate) fn fault(error: &object_store::Error) -> Fault {
    use object_store::Error::{NotFound, PermissionDenied, Unauthenticated};
    let text = one_line(&error.to_string());
    match error {
        // Of a write: there is no such bucket.
        PermissionDenied { .. } | Unauthenticated { .. } | NotFound { .. } => Fault::Refused(text),
        _ => Fault::Failed(text),
    }
}

/// Whether an error says that there is no such bucket or container, and not only no such object.
pub(crate) fn is_no_bucket(error: &object_store::Error) -> bool {
    let text = error.to_string();
    ["NoSuchBucket", "ContainerNotFound"].iter().any(|code| text.contains(code))
}

pub(crate) fn one_line(text: &str) -> String {
    let mut line = match text.split_once('<') {
        None => text.to_owned(),
        Some((before, answer)) => {
            let code = element(answer, "Code").unwrap_or("an error");
            let message = element(answer, "Message").map(|it| format!(": {it}"));
            format!("{before}{code}{}", message.unwrap_or_default())
        }
    };
    line = line.split_whitespace().collect::<Vec<_>>().join(" ");
    if let Some((end, _)) = line.char_indices().nth(LEN_MAX) {
        line.truncate(end);
        line.push('…');
    }
    line
}

fn element<'a>(xml: &'a str, name: &str) -> Option<&'a str> {
    let (_, begins) = xml.split_once(&format!("<{name}>"))?;
    begins.split_once("</").map(|(text, _)| text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_in_xml_is_its_code_and_message() {
        let text = "Server returned non-2xx status code: 403 Forbidden: <?xml version=\"1.0\"?>\n<Error>\
                    <Code>SignatureDoesNotMatch</Code><Message>It does not\nmatch.</Message>\
                    <CanonicalRequest>x-amz-security-token:hidden</CanonicalRequest></Error>";
        let expected = "Server returned non-2xx status code: 403 Forbidden: SignatureDoesNotMatch: It does not match.";
        assert_eq!(one_line(text), expected);
    }

    #[test]
    fn a_long_answer_is_cut() {
        assert_eq!(one_line(&"é".repeat(5000)).chars().count(), LEN_MAX + 1);
    }
}
