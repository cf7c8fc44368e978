"The longer experiments of the course: one harness and a recipe per sweep; they write records."
